#include "ranks.h"
