"""What a checkpoint of a run holds beside the weights, how it is written, and what it must share with its reader."""
