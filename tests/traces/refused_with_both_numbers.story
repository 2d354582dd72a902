A request that no pool can ever hold is refused at once, with both numbers.

given
    block size 2
    worker w0 blocks 8
    store s0 budget 8
    gateway g0
    client c0 prompt 6 max 12

story
    come c0
    see k1 -> g0 ReportReply
    run 300
    expect c0 failure == exhausted
    finish
