"""The specification: every operation in plain torch, float32."""
