The writer is stopped in the middle of its copy; its reservation ends; another request's payload is
committed; then the writer goes on copying.
Rule: pages stay in quarantine, and count, until their writer has acknowledged or is dead.

given
    block size 2
    worker w0 blocks 4 step 20
    worker w1 blocks 4 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 4 max 4
    client c1 prompt 4 max 4
    client c2 prompt 4 max 4

story
    come c0 c1
    see w0 -> g0 Tokens c0 index=0
    come c2
    see s0 -> w0 PutGrant c0
    stop w0
    run 3500
    expect s0 pages_quarantined >= 1
    go w0
    run 100
    expect s0 pages_quarantined == 0
    finish
