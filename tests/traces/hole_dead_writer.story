The writer is killed in the middle of its copy.
Rule: its pages are used again only after its process is gone and a grace for DMA has passed.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see s0 -> w0 PutGrant c0
    kill w0
    run 150
    expect s0 pages_quarantined >= 1
    run 500
    expect s0 pages_quarantined == 0
    expect s0 used_bytes == 0
    start w0
    finish
    expect c0 tokens == 6
    expect c1 tokens == 6
