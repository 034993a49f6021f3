"""Data for fine-tuning: conversations, and prompts with completions, whose answers alone count."""
