"""Engine Room: TensorRT engines for the Stable Diffusion UNet, without baked weights.

Importing this package imports the standard library only and has no side effect.
"""

__version__ = "0.1.0"
