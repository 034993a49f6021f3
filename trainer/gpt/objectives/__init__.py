"""Objectives of a language model beside the next token: each is a file, and a field of
`GPTTrainConfig` with its name."""
