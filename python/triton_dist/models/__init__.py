"""Parts of model scripts: a model of blocks to be shared out, a key-value cache, seeds."""

from triton_dist.models.config import ModelConfig
from triton_dist.models.kv_cache import KV_Cache
from triton_dist.models.llm import LLM, AutoLLM

__all__ = ["LLM", "AutoLLM", "KV_Cache", "ModelConfig"]
