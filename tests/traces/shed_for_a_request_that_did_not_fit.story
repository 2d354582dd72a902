A request that the ordinary blocks can never hold is accepted: the lower planes leave for it, it
runs in their bytes, and when it has ended they come back.

given
    block size 2
    worker w0 blocks 6 tail 4 return 50
    store s0 budget 8
    gateway g0
    set levels 2
    client c0 prompt 4 max 14

story
    come c0
    see k1 -> w0 Admit c0
    see k1 -> w0 ReportReply precision.shed=true
    see w0 hears PlanesShed
    expect w0 planes == open
    expect w0 blocks_gained == 4
    see w0 -> g0 Tokens c0 index=13
    expect c0 tokens <= 14
    see k1 -> w0 ReportReply precision.shed=false
    see w0 hears PlanesRestored
    expect w0 planes == held
    expect w0 blocks_gained == 0
    finish
    expect c0 tokens == 14
    expect w0 sheds == 1
    expect w0 planes_returns == 1
    expect w0 requests_swapped_total == 0
