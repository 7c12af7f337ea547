"""``commctl fit`` and ``commctl predict``: models of communication, and what they say of a recorded job."""
