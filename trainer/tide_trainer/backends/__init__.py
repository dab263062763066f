"""What trains and what serves: the only package that imports torch, vllm or megatron."""
