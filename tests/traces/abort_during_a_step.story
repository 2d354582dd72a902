An abort arrives while a step computes with the request's blocks: they stay out of use until the
step has ended.

given
    block size 8
    worker w0 blocks 3 step 40
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    abort c0
    see g0 -> w0 Drop c0
    run 1
    expect w0 lacks c0
    expect w0 blocks_quarantined == 3
    see w0 hears StepDone
    expect w0 blocks_quarantined == 0
    finish
    expect c1 tokens == 6
