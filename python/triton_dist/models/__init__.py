"""Building blocks of model scripts: a tensor-parallel LLM, a key-value cache and seeds."""

from triton_dist.models.config import ModelConfig
from triton_dist.models.kv_cache import KV_Cache
from triton_dist.models.llm import LLM, AutoLLM

__all__ = ["LLM", "AutoLLM", "KV_Cache", "ModelConfig"]
