"""Sampling: the choice of the next token as a pure function of (logits, seed, token index)."""

from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.row import SampledToken, SamplingRow
from engine.sampling.sampler import sample

__all__ = ["SampledToken", "SamplingRow", "prompt_logprobs", "sample"]
