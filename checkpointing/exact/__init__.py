"""The same bits on any number of ranks: virtual ranks, whose gradients are summed in one fixed tree."""
