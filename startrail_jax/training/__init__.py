"""What `train.py` needs beside the model: config, data, sharding. The core never imports it."""
