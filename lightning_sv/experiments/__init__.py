"""The paper's experiments: strategies compared in pairs with a baseline, the statistics, the figures.

Everything here reads what a run left on disk (event files, config, summary), never a live model,
so a comparison can be drawn again long after its runs ended, on a machine without torch devices.
"""
