"""ComfyUI nodes, in the V1 form that every version since 0.3.40 loads."""

from .build import EngineRoomBuild, EngineRoomExport
from .compare import EngineRoomCompare
from .load import EngineRoomLoad
from .model import EngineRoomModel

NODE_CLASS_MAPPINGS = {
    "EngineRoomModel": EngineRoomModel,
    "EngineRoomBuild": EngineRoomBuild,
    "EngineRoomExport": EngineRoomExport,
    "EngineRoomCompare": EngineRoomCompare,
    "EngineRoomLoad": EngineRoomLoad,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "EngineRoomModel": "TensorRT",
    "EngineRoomBuild": "Build TRT engine",
    "EngineRoomExport": "Export ONNX",
    "EngineRoomLoad": "Load TRT engine",
    "EngineRoomCompare": "Compare with TRT engine",
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
