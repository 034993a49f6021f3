"""Language models: their config, data, objective, and text from them."""
