"""What of torchtitan's decoders is replaced, annotated or chunked here: the parts of a model."""
