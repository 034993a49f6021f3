"""The task of a language model: data, objective, generation and samples."""
