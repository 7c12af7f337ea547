"""What the ranks of a cell do; a scene is a function of a ``faults.scene.Scene``, which every rank runs."""
