"""`python -m trainer.gpt.export`: a run of a GPT as a model in the format of Hugging Face."""
