"""The paper's experiments: strategies compared in pairs with a baseline, and the figures.

All modules read the files of a run (events, config, summary), never a live model. So a comparison
can be drawn again long after its runs ended.
"""
