"""The training program: what a run of train.py or sample.py is made of, beside the models."""
