A request whose blocks are in the tail goes on while the planes come back: its blocks move into
ordinary ones, which another request has left, and it is not swapped out.

given
    block size 2
    worker w0 blocks 6 tail 8 return 10 step 20
    store s0 budget 16
    gateway g0
    set levels 2
    client c0 prompt 4 max 14
    client c1 prompt 2 max 8
    client c2 prompt 2 max 2 exact true

story
    come c0
    see w0 hears PlanesShed
    run 60
    come c1
    see w0 -> g0 Tokens c1 index=0
    expect w0 blocks_in_tail >= 1
    see w0 -> g0 Tokens c0 index=13
    come c2
    see w0 hears PlanesRestored
    expect w0 blocks_in_tail == 0
    expect w0 blocks_moved >= 1
    expect w0 has c1 decode
    expect w0 requests_swapped_total == 0
    finish
    expect c1 tokens == 8
    expect c2 tokens == 2
