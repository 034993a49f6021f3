"""Low-rank adapters of a run of a GPT: how they are read, merged and exported."""
