"""Structured output in the engine: grammars are compiled beside the steps, and mask the tokens of each next draw."""
