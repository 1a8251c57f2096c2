"""Building blocks of model scripts: a tensor-parallel LLM, its configuration, a key-value cache."""

from triton_dist.models.config import ModelConfig
from triton_dist.models.kv_cache import KV_Cache
from triton_dist.models.llm import LLM, AutoLLM

__all__ = ["LLM", "AutoLLM", "KV_Cache", "ModelConfig"]
