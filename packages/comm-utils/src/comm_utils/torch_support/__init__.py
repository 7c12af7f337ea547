"""What every layer on torch shares; the one part of this package, beside ``testing``, that needs torch."""
