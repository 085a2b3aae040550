"""The health of quantized experts while Megatron trains: measured, reduced, written, warned of."""
