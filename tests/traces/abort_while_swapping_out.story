An abort arrives while the victim's blocks are being copied out.

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
    see s0 -> w0 PutGrant c0
    abort c0
    run 1000
    expect w0 lacks c0
    expect s0 used_bytes == 0
    expect s0 puts == 0
    finish
    expect c0 failure == aborted
    expect c1 tokens == 6
