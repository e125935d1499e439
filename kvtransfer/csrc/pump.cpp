// Takes page frames off a non-blocking stream socket (kvtransfer/wire.py): each payload straight into the target of the
// read that asked for it, digested in pieces right behind the kernel's copy, while the bytes are in the cache. Frames of
// any other kind, and whatever breaks a rule, are left to Python with their header.
//
// One thread receives; any thread may call a read off. Both do it by one compare-and-swap on the slot's state, so that
// a target is never written after its read was called off.

#include <cerrno>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "page_digest.h"

namespace {

constexpr size_t FRAME_BYTES = 24, MAX_LANDED = 64, SCRATCH_BYTES = 65536;
constexpr size_t MAX_BYTES = 4 << 20;  // of one call: those who wait for the first page wait for the last one's too
constexpr uint8_t MAGIC[4] = {'P', 'D', 'K', 'V'}, VERSION = 2, KIND_PAGE = 6;

enum State : uint64_t { FREE = 0, ASKED = 1, MOVING = 2, CALLED_OFF = 3, LANDED = 4 };
enum Outcome : int64_t { DRY = 0, FULL = 1, OTHER = 2, CLOSED = 3 };  // negative: an error number

// Mirrors kvtransfer/tcp/pump.py, as the two below do; 8-byte fields only. A read that the source was asked for.
struct Slot {
    uint64_t sequence;
    uint8_t* target;
    uint64_t index;
    uint64_t valid_rows;
    uint64_t state;
};

// A page that came. arrived_ns: when its last byte was in the target; 0 if its read had been called off.
struct Landed {
    uint64_t sequence;
    uint64_t arrived_ns;
    uint8_t digest[16];
};

struct Pump {
    Slot* slots;
    uint64_t mask;  // slots less one; a sequence's slot is the one of its low bits
    uint64_t page_bytes;
    const uint8_t* header;  // for the digest; null takes none
    uint64_t begun_ns;      // when the frame under way began; 0 between frames
    uint64_t have;          // bytes of a header that are there
    Slot* slot;             // of the page under way, or null
    uint64_t at;            // its bytes that are there
    uint64_t digested;      // and of those, the digested ones
    uint64_t num_landed;    // in this call
    uint64_t lanes[8];
    uint8_t frame[FRAME_BYTES];
    Landed landed[MAX_LANDED];
    uint8_t scratch[SCRATCH_BYTES];
};

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

bool change(Slot& slot, uint64_t from, uint64_t to) {
    return __atomic_compare_exchange_n(&slot.state, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

uint32_t big32(const uint8_t* at) {
    uint32_t value;
    std::memcpy(&value, at, sizeof value);
    return __builtin_bswap32(value);
}

// The header is whole: whether it opens a page that somebody waits for. magic, version, kind, code, sequence, body
// bytes, payload bytes; big-endian.
bool open_page(Pump& pump) {
    const uint8_t* frame = pump.frame;
    if (std::memcmp(frame, MAGIC, sizeof MAGIC) != 0 || frame[4] != VERSION || frame[5] != KIND_PAGE) return false;
    if (big32(frame + 16) != 0 || big32(frame + 20) != pump.page_bytes) return false;
    const uint64_t sequence = static_cast<uint64_t>(big32(frame + 8)) << 32 | big32(frame + 12);
    Slot& slot = pump.slots[sequence & pump.mask];
    if (slot.sequence != sequence) return false;
    if (!change(slot, ASKED, MOVING) && __atomic_load_n(&slot.state, __ATOMIC_ACQUIRE) != CALLED_OFF) return false;
    pump.slot = &slot;
    pump.have = pump.at = pump.digested = 0;
    if (pump.header != nullptr) page_digest::begin(pump.header, slot.index, slot.valid_rows).store(pump.lanes);
    return true;
}

// Once the page is begun nobody else changes its slot.
bool is_called_off(const Slot& slot) { return __atomic_load_n(&slot.state, __ATOMIC_RELAXED) == CALLED_OFF; }

void digest_whole_blocks(Pump& pump) {
    const size_t there = std::min<size_t>(pump.at / xxh3::BLOCK * xxh3::BLOCK, page_digest::whole_blocks(pump.page_bytes));
    xxh3::Lanes lanes = xxh3::Lanes::load(pump.lanes);
    for (; pump.digested < there; pump.digested += xxh3::BLOCK) xxh3::block(lanes, pump.slot->target + pump.digested);
    lanes.store(pump.lanes);
}

void land(Pump& pump, uint64_t arrived_ns) {
    Landed& landed = pump.landed[pump.num_landed++];
    landed.sequence = pump.slot->sequence;
    landed.arrived_ns = 0;
    if (!is_called_off(*pump.slot)) {
        landed.arrived_ns = arrived_ns;
        if (pump.header != nullptr)
            page_digest::end(xxh3::Lanes::load(pump.lanes), pump.header, pump.slot->target, pump.page_bytes,
                             landed.digest);
    }
    __atomic_store_n(&pump.slot->state, LANDED, __ATOMIC_RELEASE);
    pump.slot = nullptr;
    pump.begun_ns = pump.have ? arrived_ns : 0;
}

// One receive: more of the header, or more of the page and what follows it of the next header.
ssize_t take(Pump& pump, int fd) {
    iovec parts[2];
    msghdr message = {};
    message.msg_iov = parts;
    if (pump.slot == nullptr) {
        parts[0] = {pump.frame + pump.have, FRAME_BYTES - pump.have};
        message.msg_iovlen = 1;
        const ssize_t count = recvmsg(fd, &message, MSG_DONTWAIT);
        if (count > 0) {
            if (pump.begun_ns == 0) pump.begun_ns = now_ns();
            pump.have += static_cast<uint64_t>(count);
        }
        return count;
    }
    const bool off = is_called_off(*pump.slot);
    const size_t left = pump.page_bytes - pump.at, room = off ? std::min(left, SCRATCH_BYTES) : left;
    parts[0] = {off ? pump.scratch : pump.slot->target + pump.at, room};
    parts[1] = {pump.frame, FRAME_BYTES};
    message.msg_iovlen = room == left ? 2 : 1;
    const ssize_t count = recvmsg(fd, &message, MSG_DONTWAIT);
    if (count <= 0) return count;
    const size_t came = std::min(static_cast<size_t>(count), room);
    pump.have = static_cast<size_t>(count) - came;
    pump.at += came;
    return count;
}

void after(Pump& pump) {
    if (pump.slot == nullptr) return;
    const bool whole = pump.at == pump.page_bytes;
    const uint64_t arrived_ns = whole ? now_ns() : 0;
    if (pump.header != nullptr && !is_called_off(*pump.slot)) digest_whole_blocks(pump);
    if (whole) land(pump, arrived_ns);
}

// Whether there is more to receive before `until_ns`; not if the signal is set.
bool wait_for_more(int fd, int wake_fd, uint64_t until_ns) {
    const uint64_t now = now_ns();
    if (now >= until_ns) return false;
    pollfd fds[2] = {{fd, POLLIN, 0}, {wake_fd, POLLIN, 0}};
    const auto left_ms = static_cast<int>((until_ns - now + 999999) / 1000000);
    return poll(fds, 2, left_ms) > 0 && fds[0].revents != 0 && fds[1].revents == 0;
}

int64_t receive(Pump& pump, int fd, int wake_fd, uint64_t until_ns) {
    size_t taken = 0;
    while (true) {
        if (pump.slot == nullptr && pump.have == FRAME_BYTES && !open_page(pump)) {
            pump.have = pump.begun_ns = 0;
            return OTHER;
        }
        const ssize_t count = take(pump, fd);
        if (count == 0) return CLOSED;
        if (count < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) return -errno;
            if (pump.num_landed > 0 || !wait_for_more(fd, wake_fd, until_ns)) return DRY;
            continue;
        }
        taken += static_cast<size_t>(count);
        after(pump);
        if (pump.num_landed < MAX_LANDED && taken < MAX_BYTES) continue;
        // A whole header that came along is looked at now: if it is the last that came, nothing wakes us for it.
        if (pump.slot == nullptr && pump.have == FRAME_BYTES && !open_page(pump)) {
            pump.have = pump.begun_ns = 0;
            return OTHER;
        }
        return FULL;
    }
}

}  // namespace

extern "C" {

// How large the memory of a pump must be; of all zeros but for its first four fields.
__attribute__((visibility("default"))) int64_t kvt_pump_bytes() { return sizeof(Pump); }

// Receives until the socket has no more and pages came, or none came for wait_ms, or wake_fd is readable, or enough
// came, or something came that is not for us (its header is in `frame`), or the peer has left. Returns an Outcome; the
// pages that came before it are in `landed` whatever it is.
__attribute__((visibility("default"))) int64_t kvt_receive(void* pump, int64_t fd, int64_t wake_fd, int64_t wait_ms) {
    auto& own = *static_cast<Pump*>(pump);
    own.num_landed = 0;
    const uint64_t until_ns = wait_ms > 0 ? now_ns() + static_cast<uint64_t>(wait_ms) * 1000000 : 0;
    return receive(own, static_cast<int>(fd), static_cast<int>(wake_fd), until_ns);
}

// Whether a read was called off before its page began; then its target is not touched any more. Any thread.
__attribute__((visibility("default"))) int64_t kvt_call_off(void* slot) {
    return change(*static_cast<Slot*>(slot), ASKED, CALLED_OFF);
}
}
