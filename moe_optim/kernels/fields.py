"""Columns of the integer tables that the host writes and kernels read."""

# A descriptor of a member: the part of one expert that this rank owns. Addresses are those of the
# expert's first element, 0 for what does not travel; strides count elements.
SOURCE, ROWWISE_DATA, ROWWISE_SCALE, COLUMNWISE_DATA, COLUMNWISE_SCALE = range(5)
ROWS, COLS = 5, 6
STRIDES = 6
"""The row stride of the buffer in column n is in column STRIDES + n."""
BEGIN, END = 11, 12
"""First and last owned element of the expert."""
AMAX_SLOT, GLOBAL_AMAX = 13, 14
"""First slot of the expert's amax, and the address of its global amax or 0."""
DESCRIPTOR_FIELDS = 15

TILE_FIELDS = 4
"""Columns of a tile: descriptor, first row, first column, and a slot or a part."""
STATE_FIELDS = 6
"""Columns of the states of a step: addresses of gradient and both moments, row of the
hyper-parameters, index of the clip factor, address of the weight or 0."""
HYPER_FIELDS = 9
"""Columns of the hyper-parameters of a step: beta1, 1 - beta1, beta2, 1 - beta2, the bias
corrections of both moments, eps, weight decay, minus the learning rate."""
NORM_FIELDS = 4
"""Columns of a part of a norm: address of a cache line, first and last element, slot."""
TENSORWISE_FIELDS = 5
"""Columns of a part of a tensorwise weight: addresses of master and codes, elements, weight,
slot."""
SPAN_FIELDS = 4
"""Columns of an expert to fake-quantize: addresses of values and gradients, elements, first element
of the result."""
