"""GGUF: the file format of llama.cpp, its block types and its architectures."""
