"""ComfyUI: models routed through engines by a wrapper inside the network's forward."""
