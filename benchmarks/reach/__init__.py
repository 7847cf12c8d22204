"""How many models get a sound plan, and do they train: ``make bench-reach`` and ``make bench-reach-train``.

``architectures`` says which of transformers' models are run and how large, ``others`` adds models of other libraries,
``one`` plans and judges a single model, ``pool`` runs many of them in processes of their own, ``summary`` prints the
counts, and ``__main__`` is the command.
"""
