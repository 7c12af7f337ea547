"""A language model of random weights, decoded on two ranks, on each library's communication."""
