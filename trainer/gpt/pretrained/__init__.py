"""Pretrained models in the format of Hugging Face: a config.json and tensors in *.safetensors."""
