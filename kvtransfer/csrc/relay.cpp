// Carries out a re-layout plan: nested strided copies from source pages to target pages, each a whole number of equal
// units. One thread, no allocation, no lock; the caller holds the memory and has proven the plan.
//
// Whole cache lines go to the target past the cache, as in mover.cpp: a plain store would first fetch each line that it
// overwrites, and a page is not read again before the next decode step.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace {

constexpr int MAX_LOOPS = 10;
constexpr size_t LINE = 64;

enum Kind : uint64_t { COPY = 0, NARROW = 1, WIDEN = 2 };

// Mirrors kvtransfer/relay.py, 8-byte fields only. page numbers are places in the arrays of pages; starts and steps are
// bytes. Loops from the outermost to the innermost, at least two. unit: bytes of an innermost element of the source.
struct Step {
    uint64_t source_page;
    uint64_t target_page;
    uint64_t source_start;
    uint64_t target_start;
    uint64_t kind;
    uint64_t unit;
    uint64_t depth;
    uint64_t count[MAX_LOOPS];
    uint64_t source_step[MAX_LOOPS];
    uint64_t target_step[MAX_LOOPS];
};

// The innermost two loops.
struct Plane {
    size_t rows, columns;
    size_t from_row, from_column, to_row, to_column;
};

template <class Each> void each_plane(const Step& step, int level, const uint8_t* from, uint8_t* to, const Each& each) {
    if (level + 2 == static_cast<int>(step.depth)) return each(from, to);
    for (uint64_t n = 0; n < step.count[level]; n++)
        each_plane(step, level + 1, from + n * step.source_step[level], to + n * step.target_step[level], each);
}

template <class T> T load(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <class T> void store(uint8_t* at, T value) { std::memcpy(at, &value, sizeof value); }

template <size_t N> struct Bytes {
    uint8_t value[N];
};

struct Line {
#if defined(__AVX512F__)
    static void stream(uint8_t* to, const uint8_t* from) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
    }
#else
    static void stream(uint8_t* to, const uint8_t* from) {
        for (int half = 0; half < 2; half++)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + half,
                                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half));
    }
#endif
};

// Runs of whole lines, each aligned in the target.
struct Lines {
    size_t unit;
    void operator()(const Plane& p, const uint8_t* from, uint8_t* to) const {
        for (size_t r = 0; r < p.rows; r++)
            for (size_t c = 0; c < p.columns; c++) {
                const uint8_t* source = from + r * p.from_row + c * p.from_column;
                uint8_t* target = to + r * p.to_row + c * p.to_column;
                for (size_t at = 0; at < unit; at += LINE) Line::stream(target + at, source + at);
            }
    }
};

struct Runs {
    size_t unit;
    void operator()(const Plane& p, const uint8_t* from, uint8_t* to) const {
        for (size_t r = 0; r < p.rows; r++)
            for (size_t c = 0; c < p.columns; c++)
                std::memcpy(to + r * p.to_row + c * p.to_column, from + r * p.from_row + c * p.from_column, unit);
    }
};

template <class T> struct Units {
    void operator()(const Plane& p, const uint8_t* from, uint8_t* to) const {
        for (size_t r = 0; r < p.rows; r++) {
            const uint8_t* source = from + r * p.from_row;
            uint8_t* target = to + r * p.to_row;
            if (p.to_column == sizeof(T))
                for (size_t c = 0; c < p.columns; c++) store(target + c * sizeof(T), load<T>(source + c * p.from_column));
            else
                for (size_t c = 0; c < p.columns; c++) store(target + c * p.to_column, load<T>(source + c * p.from_column));
        }
    }
};

// Neighbours along the rows in the source, along the columns in the target: blocks of 8 x 8 words in registers.
struct Transposed {
    static void block(const uint8_t* from, size_t from_column, uint8_t* to, size_t to_row) {
        __m256 a[8], b[8];
        for (int c = 0; c < 8; c++) a[c] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + c * from_column));
        for (int n = 0; n < 8; n += 2) {
            b[n] = _mm256_unpacklo_ps(a[n], a[n + 1]);
            b[n + 1] = _mm256_unpackhi_ps(a[n], a[n + 1]);
        }
        for (int n = 0; n < 8; n += 4)
            for (int half = 0; half < 2; half++) {
                a[n + 2 * half] = _mm256_shuffle_ps(b[n + half], b[n + 2 + half], 0x44);
                a[n + 2 * half + 1] = _mm256_shuffle_ps(b[n + half], b[n + 2 + half], 0xEE);
            }
        for (int r = 0; r < 8; r++) {
            const __m256 low = a[r % 4], high = a[r % 4 + 4];
            const __m256 row = r < 4 ? _mm256_permute2f128_ps(low, high, 0x20) : _mm256_permute2f128_ps(low, high, 0x31);
            _mm256_storeu_ps(reinterpret_cast<float*>(to + r * to_row), row);
        }
    }

    void operator()(const Plane& p, const uint8_t* from, uint8_t* to) const {
        const size_t rows = p.rows / 8 * 8, columns = p.columns / 8 * 8;
        for (size_t r = 0; r < rows; r += 8)
            for (size_t c = 0; c < columns; c += 8)
                block(from + r * 4 + c * p.from_column, p.from_column, to + r * p.to_row + c * 4, p.to_row);
        Plane rest = p;
        rest.columns = p.columns - columns;
        Units<uint32_t>{}(rest, from + columns * p.from_column, to + columns * 4);
        rest.columns = columns, rest.rows = p.rows - rows;
        Units<uint32_t>{}(rest, from + rows * 4, to + rows * p.to_row);
    }
};

// Round to nearest, ties to even; a NaN stays one, made quiet.
inline uint16_t narrow(uint32_t bits) {
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

inline uint32_t widen(uint16_t bits) { return static_cast<uint32_t>(bits) << 16; }

inline uint16_t same(uint16_t bits) { return bits; }

// Elements that become others on the way; unit: as many in a row as are neighbours on both sides.
template <class From, class To, To (*become)(From)> struct Converted {
    size_t unit;

    void operator()(const Plane& p, const uint8_t* from, uint8_t* to) const {
        if (unit == 2 * sizeof(From)) return each<2>(p, from, to, 2);
        if (unit == sizeof(From)) return each<1>(p, from, to, 1);
        each<0>(p, from, to, unit / sizeof(From));
    }

    template <size_t FIXED> static void each(const Plane& p, const uint8_t* from, uint8_t* to, size_t given) {
        const size_t n = FIXED ? FIXED : given;
        for (size_t r = 0; r < p.rows; r++)
            for (size_t c = 0; c < p.columns; c++) {
                const uint8_t* __restrict source = from + r * p.from_row + c * p.from_column;
                uint8_t* __restrict target = to + r * p.to_row + c * p.to_column;
                for (size_t e = 0; e < n; e++)
                    store(target + e * sizeof(To), become(load<From>(source + e * sizeof(From))));
            }
    }
};

// Two rows that alternate in the source become two runs.
template <class From, class To, To (*become)(From)> struct Parted {
    static bool fits(const Plane& p, size_t unit) {
        return p.rows == 2 && unit == sizeof(From) && p.from_row == sizeof(From) && p.from_column == 2 * sizeof(From) &&
               p.to_column == sizeof(To);
    }

    void operator()(const Plane& p, const uint8_t* __restrict from, uint8_t* to) const {
        uint8_t* __restrict first = to;
        uint8_t* __restrict second = to + p.to_row;
        for (size_t c = 0; c < p.columns; c++) {
            store(first + c * sizeof(To), become(load<From>(from + 2 * c * sizeof(From))));
            store(second + c * sizeof(To), become(load<From>(from + (2 * c + 1) * sizeof(From))));
        }
    }
};

// Two runs alternate in the target.
template <class From, class To, To (*become)(From)> struct Joined {
    static bool fits(const Plane& p, size_t unit) {
        return p.columns == 2 && unit == sizeof(From) && p.from_row == sizeof(From) && p.to_row == 2 * sizeof(To) &&
               p.to_column == sizeof(To);
    }

    void operator()(const Plane& p, const uint8_t* from, uint8_t* __restrict to) const {
        const uint8_t* __restrict first = from;
        const uint8_t* __restrict second = from + p.from_column;
        for (size_t r = 0; r < p.rows; r++) {
            store(to + 2 * r * sizeof(To), become(load<From>(first + r * sizeof(From))));
            store(to + (2 * r + 1) * sizeof(To), become(load<From>(second + r * sizeof(From))));
        }
    }
};

bool in_lines(const Step& step, const uint8_t* target) {
    uint64_t odd = step.unit | reinterpret_cast<uintptr_t>(target);
    for (uint64_t level = 0; level < step.depth; level++) odd |= step.target_step[level];
    return odd % LINE == 0;
}

Plane plane_of(const Step& step) {
    const uint64_t row = step.depth - 2, column = step.depth - 1;
    return {step.count[row],          step.count[column],     step.source_step[row], step.source_step[column],
            step.target_step[row], step.target_step[column]};
}

template <class Body> void run(const Step& step, const uint8_t* from, uint8_t* to, const Body& body) {
    const Plane plane = plane_of(step);
    each_plane(step, 0, from, to, [&](const uint8_t* source, uint8_t* target) { body(plane, source, target); });
}

template <class From, class To, To (*become)(From)>
void convert(const Step& step, const uint8_t* from, uint8_t* to) {
    using Apart = Parted<From, To, become>;
    using Together = Joined<From, To, become>;
    if (Apart::fits(plane_of(step), step.unit)) return run(step, from, to, Apart{});
    if (Together::fits(plane_of(step), step.unit)) return run(step, from, to, Together{});
    run(step, from, to, Converted<From, To, become>{step.unit});
}

void copy_words(const Step& step, const uint8_t* from, uint8_t* to) {
    const Plane plane = plane_of(step);
    if (plane.from_row == 4 && plane.to_column == 4) return run(step, from, to, Transposed{});
    run(step, from, to, Units<uint32_t>{});
}

void copy(const Step& step, const uint8_t* from, uint8_t* to) {
    if (in_lines(step, to)) return run(step, from, to, Lines{step.unit});
    switch (step.unit) {
        case 2: return convert<uint16_t, uint16_t, same>(step, from, to);
        case 4: return copy_words(step, from, to);
        case 8: return run(step, from, to, Units<uint64_t>{});
        case 16: return run(step, from, to, Units<Bytes<16>>{});
        case 32: return run(step, from, to, Units<Bytes<32>>{});
        default: return run(step, from, to, Runs{step.unit});
    }
}

}  // namespace

extern "C" {

// Does every step both of whose pages are there (not null), in order. Returns how many.
__attribute__((visibility("default"))) int64_t kvt_relay(const void* steps, int64_t count, const uint8_t* const* sources,
                                                         uint8_t* const* targets) {
    int64_t done = 0;
    for (const Step* step = static_cast<const Step*>(steps); count-- > 0; step++) {
        const uint8_t* from = sources[step->source_page];
        uint8_t* to = targets[step->target_page];
        if (from == nullptr || to == nullptr) continue;
        from += step->source_start, to += step->target_start;
        switch (step->kind) {
            case NARROW: convert<uint32_t, uint16_t, narrow>(*step, from, to); break;
            case WIDEN: convert<uint16_t, uint32_t, widen>(*step, from, to); break;
            default: copy(*step, from, to);
        }
        done++;
    }
    _mm_sfence();  // stores past the cache are in no order otherwise
    return done;
}
}
