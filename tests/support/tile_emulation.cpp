// Emulates the tile instructions of Intel AMX on processors without them, so that tests can run machine code that has
// them.
//
// Such a processor raises SIGILL at each of these instructions. The handler decodes the instruction, computes it with
// the model of kernels/cpu/csrc/tile_model.h, and continues after it. An instruction that a processor with tiles would
// refuse ends the process with a message. All other instructions are left to the handler that was installed before.

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <initializer_list>

#include "tile_model.h"

namespace {

struct sigaction previous;
std::atomic<int64_t> threads_with_tiles{0};

// An instruction with a VEX prefix of three bytes. The fields are named as in volume 2 of Intel's manual.
struct Instruction {
    int opcode, prefix, mod, reg, rm, vvvv;  // prefix: 0 for none, 1 for 66, 2 for F3, 3 for F2
    bool has_sib;
    int length = 5;
    int64_t address = 0, scaled_index = 0;  // of the operand in memory: base plus displacement, and the index

    // Whether the prefix at `code` selects the map 0F38, vectors of 128 bits and W0, as for all instructions on tiles.
    static bool is_of_tiles(const uint8_t* code) {
        return code[0] == 0xc4 && (code[1] & 0x1f) == 2 && (code[2] & 0x84) == 0;
    }

    Instruction(const uint8_t* code, const greg_t* registers)
        : opcode(code[3]),
          prefix(code[2] & 3),
          mod(code[4] >> 6),
          reg((code[4] >> 3 & 7) | (code[1] & 0x80 ? 0 : 8)),
          rm((code[4] & 7) | (code[1] & 0x20 ? 0 : 8)),
          vvvv(~code[2] >> 3 & 15),
          has_sib(mod != 3 && rm % 8 == 4) {
        if (mod == 3) return;
        int base = rm;
        if (has_sib) {
            const uint8_t sib = code[length++];
            base = (sib & 7) | (rm & 8);
            const int index = (sib >> 3 & 7) | (code[1] & 0x40 ? 0 : 8);
            if (index != 4) scaled_index = value(registers, index) * (1 << (sib >> 6));
        }
        const bool has_base = mod != 0 || base % 8 != 5;
        int32_t displacement = 0;
        if (mod == 1) {
            displacement = int8_t(code[length++]);
        } else if (mod == 2 || !has_base) {
            std::memcpy(&displacement, code + length, sizeof displacement);
            length += sizeof displacement;
        }
        address = displacement + (has_base ? value(registers, base) : has_sib ? 0 : int64_t(code + length));
    }

    static int64_t value(const greg_t* registers, int number) {
        static constexpr int PLACES[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                           REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
        return registers[PLACES[number]];
    }
};

// Computes an instruction on the tiles of this thread. Returns false if it is not among those that the kernels use.
bool emulate(const Instruction& it) {
    vmp::TileModel& tiles = vmp::tile_model();
    const bool was_configured = tiles.is_configured(), is_memory = it.mod != 3, has_vvvv = it.vvvv != 0;
    if (it.reg > 7 || it.vvvv > 7 || (!is_memory && it.rm > 7)) return false;
    switch (it.opcode << 4 | it.prefix) {
        case 0x490:  // LDTILECFG and TILERELEASE
            if (has_vvvv || it.reg != 0 || (!is_memory && it.rm != 0)) return false;
            is_memory ? tiles.configure((const void*)(it.address + it.scaled_index)) : tiles.release();
            threads_with_tiles += tiles.is_configured() - was_configured;
            return true;
        case 0x493:  // TILEZERO
            if (has_vvvv || is_memory || it.rm != 0) return false;
            tiles.zero(it.reg);
            return true;
        case 0x4b3:  // TILELOADD
            if (has_vvvv || !it.has_sib) return false;
            tiles.load(it.reg, (const void*)it.address, it.scaled_index);
            return true;
        case 0x4b2:  // TILESTORED
            if (has_vvvv || !it.has_sib) return false;
            tiles.store(it.reg, (void*)it.address, it.scaled_index);
            return true;
        case 0x5c2:  // TDPBF16PS
            if (is_memory) return false;
            tiles.product_bf16(it.reg, it.rm, it.vvvv);
            return true;
        case 0x5e1:  // TDPBUSD
            if (is_memory) return false;
            tiles.product_of_bytes<uint8_t>(it.reg, it.rm, it.vvvv);
            return true;
        case 0x5e3:  // TDPBSSD
            if (is_memory) return false;
            tiles.product_of_bytes<int8_t>(it.reg, it.rm, it.vvvv);
            return true;
    }
    return false;
}

void handle(int, siginfo_t*, void* context) {
    greg_t* const registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    const uint8_t* const code = (const uint8_t*)registers[REG_RIP];
    try {
        if (Instruction::is_of_tiles(code)) {
            const Instruction instruction(code, registers);
            if (emulate(instruction)) {
                registers[REG_RIP] += instruction.length;
                return;
            }
        }
    } catch (const std::exception& fault) {
        for (const char* text : {fault.what(), "\n"}) (void)!write(2, text, std::strlen(text));
        std::abort();
    }
    sigaction(SIGILL, &previous, nullptr);  // for the same instruction, which raises the signal again
}

}  // namespace

extern "C" {

void start_emulation() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, &previous);
}

void stop_emulation() { sigaction(SIGILL, &previous, nullptr); }

// Returns the number of threads whose tiles are configured.
int64_t configured_threads() { return threads_with_tiles; }

}  // extern "C"
