"""A simulation of durable steps: the engine runs on files in memory, which fail and lose power.

`disk` has files and folders, and what a power cut leaves of them. `machine` runs from a boot to its
end, and is struck at one operation. `drive` gives what the native module gives, `system` what `os`
gives, `distributed` what `torch.distributed` gives to the ranks of `processes`, and
`checkpoint_files` what those calls give that name checkpoints by paths. Store, scheduler, pipeline,
exchange, committer, commit log and checkpoints are the package's own.

`programs` has tiny programs that train, `life` runs one on a machine for each rank, and `seeds`
says what becomes of it: each machine that stops leaves a disk, and the next process goes on from
that. The bits must be those of a run that nobody disturbed. `snapshots` has those that processes
make, and loads what is left of them. `many` runs seeds in processes, and
`planted` breaks the package on purpose. `python -m simulation --help`, in the folder `tests`.

[Note: what a seed decides]
A decision follows from the seed and the identity of an operation: what it does, in which file,
where, and how many times that was done there since the boot. So threads may come in any order: the
machine is struck at the same operation, and the same changes are lost. Two things stay open to the
order of threads. The first is what else is under way, or not yet flushed, as the machine is struck:
an update may have written one chunk more or less. The second are requests that the engine makes or
leaves out as time allows: what it prefetches, and updates that it begins on a guess. So a seed
replays what it found, as a rule at once and else in a few tries. Latencies are sleeps of
microseconds to two milliseconds, also by the seed.

Bits of the states may also rot between two machines.

[Note: several ranks]
One seed of five has two or three ranks. They are threads of this process, each with a machine, a
model and generators of its own, and what it starts belongs to it. A collective, a message and a
note in the store are operations as well: a rank can be struck there, too. What strikes one rank
does so at the same operation in every replay; where the others are by then is left to threads. So a
second rank often has a blow of its own, as a rule at the same operation, before it or after. A rank
may also leave alone. A process that has stopped is found gone at once: whoever waits for it in a
collective gets an error, and time, which hardly passes before, passes fast for whoever waits for a
note. So no outcome depends on a clock. The store is gone with rank 0, in half of the lives. A power
cut takes all machines, or those alone that were struck.

All ranks must go on with the same step, and each with the bits of the same rank undisturbed.

[Note: snapshots]
One seed of four has some. All ranks begin them at one moment of the program, which is drawn; what
of the commit has been read when an update or a blow comes is left to threads. The snapshots of all
ranks lie in one folder, of which a power cut takes what was not flushed, whichever machine wrote
it. They are loaded from a real folder, by a run without durability and with the same ranks.

What is not simulated: loads of checkpoints on several ranks that commit, ranks that share a drive,
gloo itself, and the native engines, which have tests of their own for transfers that are continued.
"""
