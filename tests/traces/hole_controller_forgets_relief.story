Two requests grow until one lacks a block; the worker says so; the controller dies before it
acts.
Rule: reports state levels, so that the next controller hears of the shortage too.

given
    block size 2
    worker w0 blocks 4 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 2 max 5
    client c1 prompt 2 max 5

story
    come c0 c1
    see w0 -> k1 WorkerReport blocks_short=1
    kill k1
    run 500
    replace k
    see w0 -> k2 WorkerReport stalled=true
    see k2 -> w0 SwapOut
    finish
    expect c0 tokens == 5
    expect c1 tokens == 5
