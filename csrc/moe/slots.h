// Names for the uses of scratch memory in a pass.
#pragma once
#include "machine/parallel.h"

namespace kt {

// Uses of scratch (parallel.h). Per worker first, then shared ones.
enum Slot {
  kRows,
  kC,
  kPanels,
  kC2,
  kSmall,
  kAcc,
  kDropped,
  kAt,
  kUpRows,
  kFactor,
  kScaleFactors,
  kH,
  kSaved,
  kGateT,
  kUpT,
  kDownT,
  kGateG,
  kUpG,
  kDownG,
  kDownW,
  kDGate,
  kDUp,
  kDots,
  kXCodes,
  kHCodes,
  kCodes,
  kSummand,
  kDigits,
  kTurned,
  kTurnedUp,
  kNormal,
  kNormalUp,
  kCarry,
  kPartial,
  kTokens,
  kSlotsUsed
};
static_assert(kSlotsUsed <= kSlots);

}  // namespace kt
