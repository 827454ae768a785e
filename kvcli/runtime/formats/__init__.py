"""Files of models: headers read with checks, tensors mapped. No torch."""
