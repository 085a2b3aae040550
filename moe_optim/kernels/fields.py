"""Columns of the integer tables that the host writes and kernels read."""

# Descriptor of a member, the owned part of one expert. Addresses point to the expert's first
# element, 0 for buffers that are not gathered; strides count elements.
SOURCE, ROWWISE_DATA, ROWWISE_SCALE, COLUMNWISE_DATA, COLUMNWISE_SCALE = range(5)
ROWS, COLS = 5, 6
STRIDES = 6
"""Offset of the row strides: column STRIDES + n is the row stride of the buffer in column n."""
BEGIN, END = 11, 12
"""First and end (exclusive) owned element of the expert."""
AMAX_SLOT, GLOBAL_AMAX = 13, 14
"""First slot of the expert's amax, and the address of its global amax or 0."""
DESCRIPTOR_FIELDS = 15

TILE_FIELDS = 4
"""Columns of a tile: descriptor, first row, first column, and a slot, a part or a height."""
STATE_FIELDS = 6
"""Columns of a row of states: addresses of the gradient and both moments, or of the direction and 0
twice; row of the hyper-parameters, index of the clip factor, address of the weight or 0."""
HYPER_FIELDS = 9
"""Columns of a row of hyper-parameters: beta1, 1 - beta1, beta2, 1 - beta2, the bias corrections of
both moments, eps, weight decay, negative learning rate. Of a direction: momentum, 1 - momentum,
-(weight decay * learning rate), negative learning rate, scale, extra scale factor."""
NORM_FIELDS = 4
"""Columns of a part of a norm: address of a cache line, first and end element, slot."""
TENSORWISE_FIELDS = 5
"""Columns of a part of a tensorwise weight: addresses of master and codes, numel, weight, slot."""
SPAN_FIELDS = 4
"""Columns of a span to fake-quantize: addresses of values and gradients, elements, first element of
the result."""
MATRIX_FIELDS = 8
"""Columns of a matrix: addresses of the first gradient and momentum, elements of a group of rows,
elements between two groups, row of the hyper-parameters, index of the clip factor, address of the
packed matrix, index of the sum of squares."""
MATRIX_PART_FIELDS = 5
"""Columns of a part of a matrix: matrix, first element, its distance in memory from the first
element of the matrix, elements, slot."""
