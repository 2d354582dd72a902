An abort arrives while the payload is being copied back: its blocks stay out of use until the copy
has stopped.

given
    block size 8
    worker w0 blocks 3 step 20 copy 30
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see s0 -> w0 GetGrant c0
    abort c0
    see g0 -> w0 Drop c0
    run 1
    expect w0 lacks c0
    expect w0 blocks_quarantined == 3
    see w0 hears FetchDone
    expect w0 blocks_quarantined == 0
    run 1000
    expect s0 used_bytes == 0
    finish
    expect c0 failure == aborted
