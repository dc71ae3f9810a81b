"""The real torch_npu package over a pretended device; ``.ci/npu`` makes the environment."""
