"""Run directories and the processes that write them; does not import Lightning.

directory           the files of a run directory: their names and their content
lock                which directory a run takes, and that no other run writes to it
segments            starts of a run that was resumed
provenance          commit, date and machine
tags                names of scalars
event_files         scalars of a run, from one file per start
difference          recorded settings, compared with those of this run
events              its curves, config and summary
checkpoint          a checkpoint, read without executing what it names
sharded_checkpoint  a folder with a file per rank
trust               modules of users that settings and checkpoints name
job                 a requested run: its command and the state of its directory
launch              several of them as child processes
slurm               several of them as tasks of a cluster
progress            how far a child is
output              messages of errors, and streams that cannot be written
"""
