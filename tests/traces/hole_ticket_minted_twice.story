A controller asks for a swap of a request, dies, and its successor asks for the same swap again.
Rule: order numbers carry the epoch and tickets are keyed by run and order, so no two swaps share a
ticket, and what belongs to the first is never taken for the second.

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
    hold k1 -> w0 SwapOut c0
    come c1
    see k1 -> s0 Reserve c0 ticket.order.epoch=1
    see s0 -> k1 StoreReply c0 status=ok
    stop w0
    kill k1
    replace k
    run 300
    go w0
    see k2 -> s0 Release c0 ticket.order.epoch=1
    see k2 -> s0 Reserve c0 ticket.order.epoch=2
    see k2 -> w0 SwapOut c0 ticket.order.epoch=2
    release
    see w0 -> s0 Commit c0 ticket.order.epoch=2
    finish
    expect w0 orders_refused == 1
    expect c0 tokens == 6
    expect c1 tokens == 6
