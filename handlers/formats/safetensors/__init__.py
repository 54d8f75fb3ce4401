"""safetensors files and folders of them, read as a tree and written."""
