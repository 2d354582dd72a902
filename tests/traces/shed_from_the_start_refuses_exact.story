A worker that never had lower planes runs everybody at the top level, and nobody who is exact.

given
    block size 2
    worker w0 blocks 6 without planes
    store s0 budget 16
    gateway g0
    set levels 2
    client c0 prompt 4 max 4
    client c1 prompt 2 max 4 exact true

story
    come c0
    come c1
    run 200
    expect c1 failure == exhausted
    expect w0 planes == locked
    finish
    expect c0 tokens == 4
    expect w0 sheds == 0
