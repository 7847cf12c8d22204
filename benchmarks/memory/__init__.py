"""Is what is projected what is measured? ``make bench-memory`` runs it.

``models`` and ``configurations`` are the table's rows and columns, ``cell`` measures one of them (each kind of bytes by
itself), ``peers`` asks torch's tracker and a calculator the same question, ``table`` prints, and ``__main__`` is the
command. ``replay`` compares speeds (``make bench-replay``).
"""
