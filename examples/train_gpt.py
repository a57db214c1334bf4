"""A small GPT."""
