"""From text to token ids and back: chat template, tokenizer, detokenizer, stop strings."""
